"""One engine on many hosts: process 0 plans, the others follow. Host only."""
