-- Returns whether ranges of versions by workflow include this version; 0 is a run without a version.
local function includes(supports, workflow, version)
    version = tonumber(version)
    for _, range in ipairs(supports[workflow] or {}) do
        if version == 0 or (range[1] <= version and version <= range[2]) then
            return true
        end
    end
    return false
end
