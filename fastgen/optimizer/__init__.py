"""Adapters to the hosts: the only code that imports one."""
