-- Reads several sorted sets as one, in order of score and then of the members' bytes.

-- How many members of a set are read at a time, once it has turned out to have many.
local CHUNK = 200

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

local function has_prefix(id, prefix)
    return string.sub(id, 1, #prefix) == prefix
end

-- Returns an order: from one score to another, backwards or not, after a score and a member, if
-- that score is not "".
local function order_of(backwards, from, to, score, member)
    local mark = score ~= '' and {score = tonumber(score), member = member} or nil
    return {
        range = backwards and 'ZREVRANGEBYSCORE' or 'ZRANGEBYSCORE',
        from = from,
        to = to,
        mark = mark,
        before = function(a, b)
            if a.score ~= b.score then
                return (a.score < b.score) ~= backwards
            end
            return a.member ~= b.member and bytes_before(a.member, b.member) ~= backwards
        end,
    }
end

-- Moves a source to its next member, or to nil at the end.
local function advance(source, order)
    if source.at > #source.lines and source.more then
        source.lines = redis.call(
            order.range, source.key, order.from, order.to, 'WITHSCORES',
            'LIMIT', source.offset, source.chunk
        )
        source.more = #source.lines == 2 * source.chunk
        source.offset = source.offset + source.chunk
        source.chunk = math.min(CHUNK, 4 * source.chunk)
        source.at = 1
    end
    source.member = source.lines[source.at]
    source.score = tonumber(source.lines[source.at + 1])
    source.at = source.at + 2
end

-- Returns up to `limit` of what `visit` returns for a source, a member and its score, without
-- false; if it stopped because it had examined `most` members, {score, member} of the last; and how
-- many it examined. A source has a key, and may have a quota: a table with the number that is left
-- for all sources that share it.
local function merge(sources, order, limit, most, visit)
    local chunk = math.max(4, math.min(CHUNK, math.ceil(2 * limit / #sources)))
    -- Sorted so that the next source is the last: removing it moves no other.
    local sorted = {}
    local function put(source)
        local low, high = 1, #sorted + 1
        while low < high do
            local middle = math.floor((low + high) / 2)
            if order.before(source, sorted[middle]) then
                low = middle + 1
            else
                high = middle
            end
        end
        table.insert(sorted, low, source)
    end
    for _, source in ipairs(sources) do
        source.lines, source.at, source.offset, source.chunk, source.more = {}, 1, 0, chunk, true
        repeat
            advance(source, order)
        until not (source.member and order.mark and not order.before(order.mark, source))
        if source.member then
            put(source)
        end
    end
    local found, examined, last = {}, 0, nil
    while #found < limit do
        local source = table.remove(sorted)
        if not source then
            return found, false, examined
        end
        if not source.quota or source.quota.left > 0 then
            if examined == most then
                return found, last, examined
            end
            examined = examined + 1
            last = {integer(source.score), source.member}
            local value = visit(source, source.member, source.score)
            if value then
                found[#found + 1] = value
                if source.quota then
                    source.quota.left = source.quota.left - 1
                end
            end
            advance(source, order)
            if source.member then
                put(source)
            end
        end
    end
    return found, false, examined
end
