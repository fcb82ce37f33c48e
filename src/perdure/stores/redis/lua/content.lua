-- Gives a run's snapshot and its entries in the order of their places, as one text with commas
-- between them. A client would spend more on many small texts than on their content. Gives the place
-- of the last entry, too.
local function content(run)
    local fields = redis.call('HGETALL', run)
    local texts, places, entries = {''}, {}, {}
    for at = 1, #fields, 2 do
        local field = fields[at]
        if field == 'snapshot' then
            texts[1] = fields[at + 1]
        elseif string.find(field, '^%d') then
            places[#places + 1] = field
            entries[field] = fields[at + 1]
        end
    end
    -- Of digits in equal number: any locale sorts them alike.
    table.sort(places)
    for number, place in ipairs(places) do
        texts[number + 1] = entries[place]
    end
    return table.concat(texts, ','), places[#places]
end
