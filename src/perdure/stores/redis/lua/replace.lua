-- Compare-and-set of one string.
-- KEYS: the key. ARGV: old and new value, each as "=<value>", or "" for none. Returns 1 if the key
-- had the old value, which was then replaced, otherwise 0.
local value = redis.call('GET', KEYS[1])
if (value and '=' .. value or '') ~= ARGV[1] then
    return 0
end
if ARGV[2] == '' then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], string.sub(ARGV[2], 2))
end
return 1
