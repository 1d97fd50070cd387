"""What fastgen-generate does with fairseq."""
