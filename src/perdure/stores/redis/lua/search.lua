-- Finds runs in lists or by tag, in order of time and id.
-- KEYS: the `lists` keys of shards. ARGV: limit, the maximum number of runs to examine, prefix, the
-- prefix of ids to leave out or "", "1" for newest first, the first and the last time, time and id to
-- continue after or "", and the query as JSON. Returns where the search stopped, or nil if it reached
-- the end, how many runs it examined, and the descriptions.
local limit, most, prefix, hidden, backwards = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local query = cjson.decode(ARGV[10])

local function as_set(values)
    local set = values and {}
    for _, value in ipairs(values or {}) do
        set[value] = true
    end
    return set
end

local statuses, workflows = as_set(query.statuses), as_set(query.workflows)

-- Returns the lists of a shard that have runs of these statuses and workflows.
local function lists(shard)
    local system = string.byte(prefix) == 126 and '~' or ''
    local keys = {}
    for _, list in ipairs(redis.call('SMEMBERS', shard .. 'lists')) do
        local mark, status, workflow = string.match(list, '^(~?)(%a+):(.*)$')
        local is_match = (not statuses or statuses[status])
            and (not workflows or workflows[workflow])
        if mark == system and is_match then
            keys[#keys + 1] = shard .. 'list:' .. list
        end
    end
    return keys
end

-- Returns the key of the tag that the fewest runs of a shard have.
local function rarest_tag(shard)
    local best, fewest
    for _, tag in ipairs(query.tags) do
        local key = shard .. 'tag:' .. tag
        local count = redis.call('ZCARD', key)
        if not fewest or count < fewest then
            best, fewest = key, count
        end
    end
    return {best}
end

local function has_tags(header)
    local tags = as_set(cjson.decode(header.tags))
    for _, tag in ipairs(query.tags) do
        if not tags[tag] then
            return false
        end
    end
    return true
end

local function matches(header)
    local updated = tonumber(header.updated)
    return (not query.queue or header.queue == query.queue)
        and (not statuses or statuses[header.status])
        and (not workflows or workflows[header.workflow])
        and (not query.since or updated >= query.since)
        and (not query.before or updated < query.before)
        and (not query.tags or has_tags(header))
end

local function visit(source, id)
    if not has_prefix(id, prefix) or (hidden ~= '' and has_prefix(id, hidden)) then
        return false
    end
    local description, header = describe(source.shard, id)
    return description and matches(header) and description
end

local sources = {}
for _, key in ipairs(KEYS) do
    local shard = shard_of(key)
    for _, set in ipairs(query.tags and rarest_tag(shard) or lists(shard)) do
        sources[#sources + 1] = {key = set, shard = shard}
    end
end
local order = order_of(backwards, ARGV[6], ARGV[7], ARGV[8], ARGV[9])
local descriptions, stop, examined = merge(sources, order, tonumber(limit), tonumber(most), visit)
return {stop, examined, descriptions}
