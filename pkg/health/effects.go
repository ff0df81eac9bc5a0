package health

import (
	"fmt"
	"slices"
	"strings"
)

// Effect is what a state does to scheduling, by a taint on the device.
type Effect string

const (
	// Untold is no taint at all.
	Untold Effect = "off"
	// Informing is a taint that does nothing, for who looks.
	Informing Effect = "none"
	// NoSchedule keeps new Pods away that do not tolerate it.
	NoSchedule Effect = "NoSchedule"
	// NoExecute also evicts those that run.
	NoExecute Effect = "NoExecute"
)

// Effects say what each state does. Healthy does nothing.
type Effects map[State]Effect

// DefaultEffects keep new Pods from what does not work, and leave those that run to their owners.
const DefaultEffects = "lost=NoSchedule,unhealthy=NoSchedule,unknown=none,degraded=none"

// ParseEffects reads STATE=EFFECT,…; what is not named is as in [DefaultEffects].
func ParseEffects(s string) (Effects, error) {
	effects := Effects{}
	for rule := range strings.SplitSeq(DefaultEffects+","+s, ",") {
		rule = strings.TrimSpace(rule)
		if rule == "" {
			continue
		}
		name, effect, _ := strings.Cut(rule, "=")
		state := slices.IndexFunc(stateNames, func(n string) bool { return strings.EqualFold(n, strings.TrimSpace(name)) })
		e := Effect(strings.TrimSpace(effect))
		if state <= int(Healthy) || !slices.Contains([]Effect{Untold, Informing, NoSchedule, NoExecute}, e) {
			return nil, fmt.Errorf("rule %q: want STATE=EFFECT with one of degraded, unknown, unhealthy, lost and one of off, none, NoSchedule, NoExecute", rule)
		}
		effects[State(state)] = e
	}
	return effects, nil
}

// TakesOut says whether a device of that verdict is kept from new Pods.
func (e Effects) TakesOut(v Verdict) bool {
	return slices.ContainsFunc(v.Causes, func(c Cause) bool { return e[c.State] == NoSchedule || e[c.State] == NoExecute })
}
