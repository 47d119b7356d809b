"""The store client: URLs, connections, RESP for whole arrays, and redis-servers of a run's own. Knows no rows."""
