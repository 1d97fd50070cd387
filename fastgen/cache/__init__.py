"""Caches that keep one key and value per sentence, whatever the number of beams."""
