-- KEYS: a hash. A script asks the primary, also where a client reads from replicas.
return redis.call('HGETALL', KEYS[1])
