-- KEYS: a run's mail. Gives its messages and their payloads by turns.
return redis.call('HGETALL', KEYS[1])
