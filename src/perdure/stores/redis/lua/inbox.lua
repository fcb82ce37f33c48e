-- KEYS: a run's inbox. ARGV: the first number or "-", and how many messages at most or "". Returns
-- messages in order, each {number, {name, payload}}. A script always reads from the primary, also
-- for a client that reads from replicas.
if ARGV[2] == '' then
    return redis.call('XRANGE', KEYS[1], ARGV[1], '+')
end
return redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
