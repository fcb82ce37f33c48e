-- Reads several sorted sets as one, in order of score and then of the members' bytes.

-- A script blocks all other clients: after this many members it stops, and reports where.
local MAX_MEMBERS = 5000
local CHUNK = 50

-- Lua compares strings by the server's locale, sorted sets by bytes.
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

local function has_prefix(id, prefix)
    return string.sub(id, 1, #prefix) == prefix
end

-- Moves a source to its next member, or to nil at the end.
local function advance(source, range, from, to)
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

-- Returns up to `limit` lines {number of the set, member, score} for which `is_wanted` is true;
-- and, if it stopped early, {score, id} of the last member it examined. `mark` is such a pair, to
-- continue after.
local function merge(keys, backwards, from, to, mark, limit, is_wanted)
    local range = backwards and 'ZREVRANGEBYSCORE' or 'ZRANGEBYSCORE'
    local function before(a, b)
        if a.score ~= b.score then
            return (a.score < b.score) ~= backwards
        end
        return a.member ~= b.member and bytes_before(a.member, b.member) ~= backwards
    end
    -- Sorted so that the next source is the last: removing it moves no other.
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
            advance(source, range, from, to)
            local is_done = source.member and mark
                and not before(mark, {score = source.score, member = id_of(source.member)})
        until not is_done
        if source.member then
            put(source)
        end
    end
    local lines, examined, last = {}, 0, nil
    while #lines < limit do
        local first = table.remove(sources)
        if not first then
            return lines, false
        end
        if examined == MAX_MEMBERS then
            return lines, {integer(last.score), last.member}
        end
        examined = examined + 1
        last = {score = first.score, member = id_of(first.member)}
        if is_wanted(first.member, first.score, first.number) then
            lines[#lines + 1] = {first.number, first.member, integer(first.score)}
        end
        advance(first, range, from, to)
        if first.member then
            put(first)
        end
    end
    return lines, false
end

local function mark_of(score, id)
    return score ~= '' and {score = tonumber(score), member = id} or nil
end

-- Returns the runs that are due at `to`, earliest first, of the shards whose `workflows` keys are
-- in KEYS.
local function due_runs(workflows, to, mark, limit, is_wanted)
    local keys, shards = {}, {}
    for _, key in ipairs(KEYS) do
        local shard = string.match(key, '^(.*)workflows$')
        for _, workflow in ipairs(workflows or redis.call('SMEMBERS', key)) do
            keys[#keys + 1] = shard .. 'wake:' .. workflow
            shards[#shards + 1] = shard
        end
    end
    local from = mark and integer(mark.score) or '-inf'
    local function is_wanted_here(id, at, number)
        return is_wanted(id, at, shards[number])
    end
    local lines, stopped = merge(keys, false, from, to, mark, limit, is_wanted_here)
    for _, line in ipairs(lines) do
        line[1] = shards[line[1]]
    end
    return lines, stopped
end
