"""Tables in place of JSONL: rows to request lines, records to rows. What a line means is decided elsewhere."""
