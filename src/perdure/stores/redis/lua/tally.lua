-- Counts runs one by one, a window of a sorted set at a time.
-- KEYS: a list of runs, or `ids`. ARGV: the prefix of ids to leave out or "", and a range of `ids`, or
-- the first rank in a list. Returns three values: the last id, or nil if there are no more; a flat list
-- with name and number of runs of each list; and a flat list with four values per queue: its name, the
-- numbers of due and of owned runs, and the earliest wake time of the due runs or "".
local WINDOW = 1000
local shard, hidden = shard_of(KEYS[1]), ARGV[1]
local is_list = string.sub(KEYS[1], -4) ~= ':ids'
local ids = is_list and redis.call('ZRANGE', KEYS[1], ARGV[2], ARGV[2] + WINDOW - 1)
    or redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, WINDOW)
local lists, queues = {}, {}

local function count(header)
    local list = header.status .. ':' .. header.workflow
    lists[list] = (lists[list] or 0) + 1
    local queue = queues[header.queue] or {0, 0, ''}
    local wake = tonumber(header.wake)
    if wake and wake <= now then
        queue[1] = queue[1] + 1
        queue[3] = (queue[3] == '' or wake < tonumber(queue[3])) and header.wake or queue[3]
    elseif header.owner then
        queue[2] = queue[2] + 1
    end
    queues[header.queue] = queue
end

for _, id in ipairs(ids) do
    local header = read_header(shard .. 'run:' .. id)
    if header and not (hidden ~= '' and string.sub(id, 1, #hidden) == hidden) then
        count(header)
    end
end
local list_rows, queue_rows = {}, {}
for list, number in pairs(lists) do
    list_rows[#list_rows + 1] = list
    list_rows[#list_rows + 1] = number
end
for queue, numbers in pairs(queues) do
    queue_rows[#queue_rows + 1] = queue
    for _, number in ipairs(numbers) do
        queue_rows[#queue_rows + 1] = number
    end
end
return {#ids == WINDOW and ids[WINDOW], list_rows, queue_rows}
