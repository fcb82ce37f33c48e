-- KEYS: the run. Returns its content, or nil. This is a script because a script always reads from the
-- primary, even if the client sends its reads to replicas.
if redis.call('EXISTS', KEYS[1]) == 0 then
    return false
end
return (content(KEYS[1]))
