// Rewards that are computed here (docs/rewards.md has their rules). Each is a pure function of the sample.
#pragma once
#include <memory>

#include "reward/reward.h"
#include "reward/reward_config.h"

namespace plumb {

std::unique_ptr<Reward> make_verifier(const ExactKeys& keys);
std::unique_ptr<Reward> make_verifier(const NumberKeys& keys);
std::unique_ptr<Reward> make_verifier(const LengthKeys& keys);
std::unique_ptr<Reward> make_verifier(const ChoiceKeys& keys);
std::unique_ptr<Reward> make_verifier(const ToolCallKeys& keys);
// Error: the pattern or the schema is wrong; `where` names its table in the run file.
std::unique_ptr<Reward> make_verifier(const RegexKeys& keys, const std::string& where);
std::unique_ptr<Reward> make_verifier(const SchemaKeys& keys, const std::string& where);

// The last number of a text. A number is an optional sign (+, - or U+2212), digits, which may be grouped by commas in
// threes, an optional fraction and an optional exponent; or a fraction alone. It does not begin behind a letter, a
// digit, _ or a point; a sign behind one of these, ) or ] is an operator. Nothing if there is none or it is beyond
// double precision.
std::optional<double> last_number(std::string_view text);

}  // namespace plumb
