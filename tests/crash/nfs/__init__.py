"""holdfast on NFS: a server and two clients of Linux's own, all in one User-Mode Linux."""
