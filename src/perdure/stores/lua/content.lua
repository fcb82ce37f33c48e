-- Gives {snapshot, journal} of a run; the journal as one text, its entries with commas between, in
-- the order of their places. A client would spend more on many small texts than on their content.
local function content(run)
    local fields = redis.call('HGETALL', run)
    local snapshot, places, entries = nil, {}, {}
    for at = 1, #fields, 2 do
        local field = fields[at]
        if field == 'snapshot' then
            snapshot = fields[at + 1]
        elseif string.find(field, '^%d') then
            places[#places + 1] = field
            entries[field] = fields[at + 1]
        end
    end
    -- Of digits in equal number: any locale sorts them alike.
    table.sort(places)
    for number, place in ipairs(places) do
        places[number] = entries[place]
    end
    return {snapshot or '', table.concat(places, ',')}
end
