"""Networks, each with its sharding table as data."""
