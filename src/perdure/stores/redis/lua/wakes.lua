-- Finds runs in wake sets.

-- A script blocks all other clients, so it stops after this many members and returns where it stopped.
local MAX_MEMBERS = 5000

-- Returns {name, few} for each shard of KEYS that has wake sets. `few` are these sets by queue, or false
-- if there are many. Most shards have few, and one command then finds the sets of all queues and
-- workflows.
local FEW_SETS = 50
local function shards_with_sets()
    local shards = {}
    for _, key in ipairs(KEYS) do
        local sets = redis.call('ZRANGE', key, 0, FEW_SETS)
        if sets[1] then
            local few = #sets <= FEW_SETS and {}
            for _, set in ipairs(few and sets or {}) do
                local queue = string.match(set, '^%Z*')
                few[queue] = few[queue] or {}
                table.insert(few[queue], set)
            end
            shards[#shards + 1] = {name = shard_of(key), few = few}
        end
    end
    return shards
end

-- Returns the wake sets of a queue, or only those of one workflow.
local function wake_sets(shard, queue, workflow)
    local low = queue .. '\0' .. (workflow and workflow .. '\0' or '')
    -- The range of all strings that start with `low`, which ends with a NUL.
    local high = string.sub(low, 1, -2) .. '\1'
    return redis.call('ZRANGEBYLEX', shard .. 'wakes', '[' .. low, '(' .. high)
end

-- Returns whether a wake set has runs that can be executed. `supports` are ranges of versions by
-- workflow; nil means all.
local function is_supported(set, supports)
    if not supports then
        return true
    end
    local workflow, version = string.match(set, '^%Z*%z(%Z*)%z(%d+)')
    return includes(supports, workflow, version)
end

local function add_sources(sources, shard, sets, supports, quota)
    for _, set in ipairs(sets) do
        if is_supported(set, supports) then
            sources[#sources + 1] = {key = shard .. 'wake:' .. set, shard = shard, quota = quota}
        end
    end
end

-- Calls `visit` for the runs in the shards of KEYS that are due at `to`, earliest first, and returns
-- the results of `merge`. `request` is {queues = {{queue, limit}, ...}, supports = ...}.
local function visit_due(request, to, score, id, limit, visit)
    local sources, supports, shards = {}, request.supports, shards_with_sets()
    for _, pair in ipairs(request.queues) do
        local queue, quota = pair[1], {remaining = pair[2]}
        for _, each in ipairs(shards) do
            local shard = each.name
            if each.few then
                add_sources(sources, shard, each.few[queue] or {}, supports, quota)
            elseif queue == '' and supports then
                -- Runs outside of queues can have any number of workflows; those of a queue have few.
                for workflow in pairs(supports) do
                    add_sources(sources, shard, wake_sets(shard, queue, workflow), supports, quota)
                end
            else
                add_sources(sources, shard, wake_sets(shard, queue), supports, quota)
            end
        end
    end
    local order = order_of(false, score ~= '' and score or '-inf', to, score, id)
    return merge(sources, order, limit, MAX_MEMBERS, visit)
end
