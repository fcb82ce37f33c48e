-- KEYS: runs. Returns for each its status, owner and wake time, all nil for a run that is missing.
local headers = {}
for number, run in ipairs(KEYS) do
    headers[number] = redis.call('HMGET', run, 'status', 'owner', 'wake')
end
return headers
