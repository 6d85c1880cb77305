"""Tables in place of JSONL: input rows become request lines, and result lines become rows."""
