-- KEYS: a run's inbox. Returns messages and their payloads in turn. A script always reads from the
-- primary, also for a client that reads from replicas.
return redis.call('HGETALL', KEYS[1])
