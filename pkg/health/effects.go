package health

import (
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
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

// defaultEffects keep new Pods away from broken devices, and leave running Pods alone.
var defaultEffects = Effects{Lost: NoSchedule, Unhealthy: NoSchedule, Unknown: Informational, Degraded: Informational}

// NewEffects returns the effects that set has by state, such as "lost". States that are not in set
// have their default. It returns the invalid fields below at.
func NewEffects(set map[string]Effect, at *field.Path) (Effects, field.ErrorList) {
	effects := maps.Clone(defaultEffects)
	var errs field.ErrorList
	for _, name := range slices.Sorted(maps.Keys(set)) {
		state := slices.IndexFunc(stateNames, func(n string) bool { return strings.ToLower(n) == name })
		if state <= int(Healthy) {
			errs = append(errs, field.Invalid(at.Key(name), name, "want one of the states lost, unhealthy, unknown and degraded"))
			continue
		}
		if !slices.Contains([]Effect{NoTaint, Informational, NoSchedule, NoExecute}, set[name]) {
			errs = append(errs, field.Invalid(at.Key(name), set[name], `want NoExecute, NoSchedule, none or "off" (in quotes)`))
		}
		effects[State(state)] = set[name]
	}
	return effects, errs
}

// BlocksScheduling reports whether a taint for the verdict keeps new Pods off the device.
func (e Effects) BlocksScheduling(v Verdict) bool {
	return slices.ContainsFunc(v.Causes, func(f Finding) bool { return e[f.State] == NoSchedule || e[f.State] == NoExecute })
}
