-- KEYS: the run. Gives its content, or nil. A script asks the primary, also where a client reads
-- from replicas.
if redis.call('EXISTS', KEYS[1]) == 0 then
    return false
end
return (content(KEYS[1]))
