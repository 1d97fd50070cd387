"""What `fastgen-bench` measures with: stock hosts, CTranslate2 and fastgen on the same tasks, each in a process of its own."""
