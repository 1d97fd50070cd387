"""What `fastgen-bench` measures with: hosts, CTranslate2 and fastgen on the same tasks, each in its own process."""
