-- KEYS: a run's inbox. ARGV: the number after which to begin, or "-inf", and the maximum number of
-- messages, or -1 for all. Returns messages in order. This is a script because a script always reads
-- from the primary, even if the client sends its reads to replicas.
return redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])
