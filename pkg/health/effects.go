package health

import (
	"errors"
	"slices"
	"strings"
)

// Effect is how a state affects scheduling, through a taint on the device.
type Effect string

const (
	// NoTaint adds no taint.
	NoTaint Effect = "off"
	// Informational adds a taint without effect, for people to see.
	Informational Effect = "none"
	// NoSchedule adds a taint that keeps away new Pods that do not tolerate the taint.
	NoSchedule Effect = "NoSchedule"
	// NoExecute adds a taint that also evicts running Pods that do not tolerate the taint.
	NoExecute Effect = "NoExecute"
)

// Effects maps each state to its effect on scheduling. Healthy has no effect.
type Effects map[State]Effect

// DefaultEffects keep new Pods away from broken devices, and leave running Pods alone.
const DefaultEffects = "lost=NoSchedule,unhealthy=NoSchedule,unknown=none,degraded=none"

// ParseEffects parses a list such as "lost=NoExecute,degraded=off". States that are not in the list
// have their [DefaultEffects].
func ParseEffects(s string) (Effects, error) {
	effects := Effects{}
	err := eachRule(DefaultEffects+","+s, func(name, effect string) error {
		state := slices.IndexFunc(stateNames, func(n string) bool { return strings.EqualFold(n, name) })
		if state <= int(Healthy) || !slices.Contains([]Effect{NoTaint, Informational, NoSchedule, NoExecute}, Effect(effect)) {
			return errors.New("want STATE=EFFECT with one of degraded, unknown, unhealthy, lost and one of off, none, NoSchedule, NoExecute")
		}
		effects[State(state)] = Effect(effect)
		return nil
	})
	return effects, err
}

// BlocksScheduling reports whether a taint for the verdict keeps new Pods off the device.
func (e Effects) BlocksScheduling(v Verdict) bool {
	return slices.ContainsFunc(v.Causes, func(f Finding) bool { return e[f.State] == NoSchedule || e[f.State] == NoExecute })
}
