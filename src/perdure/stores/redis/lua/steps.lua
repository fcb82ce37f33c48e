-- The first part of append.lua: writes the entries that only record a step, up to the first one that
-- does more. Most batches contain nothing else, and return here without defining the functions below.
local verdicts = {}

-- A place in the journal starts with the epoch, which always has 16 digits.
local function epoch_of(place)
    return string.sub(place, 1, 16)
end

-- Returns the verdict on an entry, and whether it must be written unless it already exists.
local function judge(run, place)
    local header = redis.call('HMGET', run, 'epoch', 'owner', 'settled')
    if not header[1] then
        return 'U', false
    end
    if header[1] ~= epoch_of(place) then
        return 'F', false
    end
    -- An epoch is open while its run has an owner: a rest and a release remove it.
    if header[2] then
        return 'A', true
    end
    -- Both places have this epoch and equal lengths, so they can be compared as strings.
    local is_settled = header[3] and place <= header[3]
    local is_written = is_settled or redis.call('HEXISTS', run, place) == 1
    return is_written and 'A' or 'F', false
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
