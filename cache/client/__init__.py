"""The store client: URLs, connections, RESP for whole arrays, and local servers. Knows no rows."""
