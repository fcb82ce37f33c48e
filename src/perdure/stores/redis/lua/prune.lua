-- Deletes runs that are still over and old: one may have been granted again since it was found.
-- KEYS: runs. ARGV: the time before which they must have been updated. Returns a number for each
-- run: 1 if it was deleted, otherwise 0.
local answers = {}
for number, run in ipairs(KEYS) do
    local header = read_header(run)
    local status = header and header.status
    local is_over = status == 'completed' or status == 'failed' or status == 'cancelled'
    answers[number] = 0
    if is_over and tonumber(header.updated) < tonumber(ARGV[1]) then
        delete(shard_and_id(run))
        answers[number] = 1
    end
end
return answers
