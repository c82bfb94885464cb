"""The plugin for NPUs on a device made of the host's memory, with the kernels on the stand-in for AscendC."""
