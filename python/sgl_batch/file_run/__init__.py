"""One run over one input file: its driver, output files, manifest, resumption and summary."""
