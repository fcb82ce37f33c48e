-- Sorted sets read as one, in order of score and then of the members' bytes.

-- A script holds everybody up: after so many members it stops, and says where it stopped.
local LOOK = 5000
local CHUNK = 50

-- The server's locale may order texts in another way than sorted sets do.
local function bytes_before(a, b)
    for at = 1, math.min(#a, #b) do
        local x, y = string.byte(a, at), string.byte(b, at)
        if x ~= y then
            return x < y
        end
    end
    return #a < #b
end

local function id_of(member)
    local zero = string.find(member, '\0', 1, true)
    return zero and string.sub(member, 1, zero - 1) or member
end

local function begins_with(id, prefix)
    return string.sub(id, 1, #prefix) == prefix
end

local function next_line(source, range, from, to)
    if source.at > #source.lines and source.more then
        source.lines = redis.call(
            range, source.key, from, to, 'WITHSCORES', 'LIMIT', source.offset, CHUNK
        )
        source.offset = source.offset + CHUNK
        source.more = #source.lines == 2 * CHUNK
        source.at = 1
    end
    source.member = source.lines[source.at]
    source.score = tonumber(source.lines[source.at + 1])
    source.at = source.at + 2
end

-- Gives up to `limit` lines {number of the set, member, score} that `wanted` takes; and, when it
-- stopped before the end, {score, id} of the last line it saw. `mark` is such a pair to go on from.
local function merge(keys, backwards, from, to, mark, limit, wanted)
    local range = backwards and 'ZREVRANGEBYSCORE' or 'ZRANGEBYSCORE'
    local function before(a, b)
        if a.score ~= b.score then
            return (a.score < b.score) ~= backwards
        end
        return a.member ~= b.member and bytes_before(a.member, b.member) ~= backwards
    end
    -- The one to go on with lies at the end.
    local sources = {}
    local function put(source)
        local low, high = 1, #sources + 1
        while low < high do
            local middle = math.floor((low + high) / 2)
            if before(source, sources[middle]) then
                low = middle + 1
            else
                high = middle
            end
        end
        table.insert(sources, low, source)
    end
    for number, key in ipairs(keys) do
        local source = {number = number, key = key, lines = {}, at = 1, offset = 0, more = true}
        repeat
            next_line(source, range, from, to)
            local seen = source.member and mark
                and not before(mark, {score = source.score, member = id_of(source.member)})
        until not seen
        if source.member then
            put(source)
        end
    end
    local lines, looked, last = {}, 0, nil
    while #lines < limit do
        local first = table.remove(sources)
        if not first then
            return lines, false
        end
        if looked == LOOK then
            return lines, {text(last.score), last.member}
        end
        looked = looked + 1
        last = {score = first.score, member = id_of(first.member)}
        if wanted(first.member, first.score, first.number) then
            lines[#lines + 1] = {first.number, first.member, text(first.score)}
        end
        next_line(first, range, from, to)
        if first.member then
            put(first)
        end
    end
    return lines, false
end

local function mark_of(score, id)
    return score ~= '' and {score = tonumber(score), member = id} or nil
end

-- Gives the due runs of shards, which are named by their `lanes` keys, earliest first.
local function agenda(workflows, to, mark, limit, wanted)
    local keys, shards = {}, {}
    for _, key in ipairs(KEYS) do
        local shard = string.match(key, '^(.*)lanes$')
        for _, lane in ipairs(workflows or redis.call('SMEMBERS', key)) do
            keys[#keys + 1] = shard .. 'wake:' .. lane
            shards[#shards + 1] = shard
        end
    end
    local from = mark and text(mark.score) or '-inf'
    local function wanted_here(id, at, number)
        return wanted(id, at, shards[number])
    end
    local lines, stopped = merge(keys, false, from, to, mark, limit, wanted_here)
    for _, line in ipairs(lines) do
        line[1] = shards[line[1]]
    end
    return lines, stopped
end
