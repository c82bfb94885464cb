"""From raw logs to JaggedBatches: readers, preparation, samplers and the data module."""
