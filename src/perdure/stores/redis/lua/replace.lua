-- KEYS: a key with a text. ARGV: old, new; each as "=<text>", or "" for nothing. Puts the new in
-- the place of the old and gives 1, or gives 0 when the old is not there.
local text = redis.call('GET', KEYS[1])
if (text and '=' .. text or '') ~= ARGV[1] then
    return 0
end
if ARGV[2] == '' then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], string.sub(ARGV[2], 2))
end
return 1
