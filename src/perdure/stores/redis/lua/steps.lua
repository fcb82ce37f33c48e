-- The beginning of append.lua: the entries that only record steps, up to the first that does more.
-- Most batches hold nothing else, and need nothing of what a run is besides.
local verdicts = {}

-- A place in the journal begins with the epoch, whose digits are as many as a tick's.
local function epoch_of(place)
    return string.sub(place, 1, 16)
end

-- Gives the verdict on an entry, and whether it is new.
local function judge(run, place)
    local header = redis.call('HMGET', run, 'epoch', 'owner', 'folded')
    if not header[1] then
        return 'U', false
    end
    if header[1] ~= epoch_of(place) then
        return 'F', false
    end
    -- An epoch is open while its run has an owner: a rest and a release end both.
    if header[2] then
        return 'A', true
    end
    -- Both are of this epoch, and as long as each other: their digits tell which is later.
    local is_folded = header[3] and place <= header[3]
    local is_known = is_folded or redis.call('HEXISTS', run, place) == 1
    return is_known and 'A' or 'F', false
end

local number = 1
while number <= #KEYS and ARGV[3 * number] == '' do
    local run, place = KEYS[number], ARGV[3 * number - 2]
    local verdict, is_new = judge(run, place)
    if is_new then
        redis.call('HSETNX', run, place, ARGV[3 * number - 1])
    end
    verdicts[number] = verdict
    number = number + 1
end
if number > #KEYS then
    return table.concat(verdicts)
end
