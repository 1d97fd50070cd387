"""What `fastgen-bench` measures with: stock hosts, CTranslate2 and fastgen, each in a process of its own."""
