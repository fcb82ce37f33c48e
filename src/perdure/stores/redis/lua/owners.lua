-- KEYS: runs. Returns the status, owner and wake time of each; all are nil for a missing run.
local headers = {}
for number, run in ipairs(KEYS) do
    headers[number] = redis.call('HMGET', run, 'status', 'owner', 'wake')
end
return headers
