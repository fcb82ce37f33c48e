-- Reads several sorted sets as one, in order of score and then of the members' bytes.

-- The maximum number of members that are read from a set at a time; the first reads are smaller.
local CHUNK = 200

-- Compares strings by their bytes, like sorted sets; Lua compares them by the server's locale.
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

-- Returns the order of a search: from one score to another, in descending order if `backwards` is
-- true, starting after the given score and member unless the score is "".
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

-- Moves a source to its next member; at the end, the member becomes nil.
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

-- Calls `visit` with each source, member and score, in order. Returns three values: up to `limit`
-- results of `visit` that are not false; {score, member} of the last member if the search stopped
-- because it had examined `most` members, otherwise false; and how many members it examined. A source
-- has a key and may have a quota, a table that several sources may share: they contribute no more
-- than `remaining` results together.
local function merge(sources, order, limit, most, visit)
    local chunk = math.max(4, math.min(CHUNK, math.ceil(2 * limit / #sources)))
    -- The next source is the last item, so that removing it does not move the others.
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
    local results, examined, last = {}, 0, nil
    while #results < limit do
        local source = table.remove(sorted)
        if not source then
            return results, false, examined
        end
        if not source.quota or source.quota.remaining > 0 then
            if examined == most then
                return results, last, examined
            end
            examined = examined + 1
            last = {integer(source.score), source.member}
            local value = visit(source, source.member, source.score)
            if value then
                results[#results + 1] = value
                if source.quota then
                    source.quota.remaining = source.quota.remaining - 1
                end
            end
            advance(source, order)
            if source.member then
                put(source)
            end
        end
    end
    return results, false, examined
end
