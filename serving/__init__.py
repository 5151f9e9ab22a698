"""The HTTP server and the command line of jaxmm. Host only."""
