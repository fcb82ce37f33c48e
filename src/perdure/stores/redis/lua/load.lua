-- KEYS: the run. Returns its content, or nil. A script always reads from the primary, also for a
-- client that reads from replicas.
if redis.call('EXISTS', KEYS[1]) == 0 then
    return false
end
return (content(KEYS[1]))
