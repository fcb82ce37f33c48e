-- KEYS: a run's inbox. ARGV: the number after which to begin, or "-inf", and how many messages at
-- most, or -1. Returns messages in order. A script always reads from the primary, also for a client
-- that reads from replicas.
return redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])
