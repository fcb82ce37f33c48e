-- Marks a shard as having the second layout, and reads the mark.
-- KEYS: the key of the mark. In the first layout it contains the last number that was assigned.
-- Returns the number of the layout, and 1 if runs of the first layout have yet to be moved.
--
-- The mark is a hash where the scripts of the first layout expect a string. From here on they fail
-- before they create or lease a run, so an older process cannot recreate a run that was moved.
local LAYOUT = '2'
local mark = KEYS[1]
local old = string.match(mark, '^(.*)sequence$')
if redis.call('TYPE', mark).ok ~= 'hash' then
    local sequence = old .. LAYOUT .. ':sequence'
    redis.call('EXISTS', mark, sequence)
    local last = redis.call('GET', mark)
    if last then
        redis.call('SET', sequence, last)
        redis.call('DEL', mark)
        redis.call('HSET', mark, 'layout', LAYOUT, 'moving', '1')
    else
        redis.call('HSET', mark, 'layout', LAYOUT)
    end
end
return {redis.call('HGET', mark, 'layout'), redis.call('HEXISTS', mark, 'moving')}
