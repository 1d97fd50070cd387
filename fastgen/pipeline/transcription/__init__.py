"""Speech recognition of files: audio of any container, by whisper's own rules, into the files that whisper writes."""
