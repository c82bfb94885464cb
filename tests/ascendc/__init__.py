"""AscendC kernels on the stand-in of tests/ascendc_host: parity, counters, guards."""
