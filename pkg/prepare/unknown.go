package prepare

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// What this version does not know of a step was written by a later one, which may read it again after a rollback: it stays, wherever in the step it is, for as
// long as that stays of which it says something.

// storeOver is what stands in the record of a step that stood there as old. Where nothing has changed that this version knows, it is old to the byte.
func storeOver(old checkpoint.Step, s Step) (checkpoint.Step, error) {
	stored, err := storeOne(s)
	if err != nil || old.Kind != stored.Kind {
		return stored, err
	}
	known, err := knownOf(old, s)
	if err != nil {
		return stored, err
	}
	if bytes.Equal(known, stored.Params) {
		return old, nil
	}
	var there [3]any
	for i, params := range []json.RawMessage{old.Params, known, stored.Params} {
		// Numbers stay as they are written: a later version's may be too long for any of ours.
		exact := json.NewDecoder(bytes.NewReader(params))
		exact.UseNumber()
		if err := exact.Decode(&there[i]); err != nil {
			return stored, fmt.Errorf("store step %s: %w", s.Kind(), err)
		}
	}
	params, err := json.Marshal(withUnknownOf(there[0], there[1], there[2]))
	if err != nil {
		return stored, fmt.Errorf("store step %s: %w", s.Kind(), err)
	}
	old.Params = params
	return old, nil
}

// knownOf is that part of a stored step which this version reads, and would write.
func knownOf(old checkpoint.Step, s Step) (json.RawMessage, error) {
	read := reflect.New(reflect.TypeOf(s).Elem()).Interface()
	if err := json.Unmarshal(old.Params, read); err != nil {
		return nil, fmt.Errorf("step %q of the record: %w", old.Kind, err)
	}
	known, err := json.Marshal(read)
	if err != nil {
		return nil, fmt.Errorf("store step %s: %w", s.Kind(), err)
	}
	return known, nil
}

// withUnknownOf is now with what is in old and not in known, which is old as far as this version reads it.
func withUnknownOf(old, known, now any) any {
	switch now := now.(type) {
	case map[string]any:
		was, _ := old.(map[string]any)
		knew, _ := known.(map[string]any)
		for name, value := range was {
			if next, stays := now[name]; stays && has(knew, name) {
				now[name] = withUnknownOf(value, knew[name], next)
			} else if !has(knew, name) && !has(now, name) {
				now[name] = value
			}
		}
	case []any:
		was, _ := old.([]any)
		knew, _ := known.([]any)
		if len(was) != len(knew) {
			return now
		}
		for i, j := range counterparts(knew, now) {
			now[i] = withUnknownOf(was[j], knew[j], now[i])
		}
	}
	return now
}

// has says whether the object has the field in whatever case, as it is read.
func has(object map[string]any, name string) bool {
	for there := range object {
		if strings.EqualFold(there, name) {
			return true
		}
	}
	return false
}

// identities are the fields that tell elements of a list apart: the first of them that an element has.
var identities = []string{"id", "daemon", "path", "containerPath", "name"}

// identity is empty for an element that has none.
func identity(element any) string {
	object, _ := element.(map[string]any)
	for _, name := range identities {
		if value, ok := object[name]; ok {
			return fmt.Sprint(value)
		}
	}
	return ""
}

// counterparts finds the elements of a list among those that were in it, all by their indexes. It is certain which is which where an element has not changed,
// and where no other has its identity.
func counterparts(was, now []any) map[int]int {
	found, taken := map[int]int{}, map[int]bool{}
	for i, element := range now {
		for j := range was {
			if !taken[j] && reflect.DeepEqual(element, was[j]) {
				found[i], taken[j] = j, true
				break
			}
		}
	}
	before := unmistakable(was)
	for id, i := range unmistakable(now) {
		if j, there := before[id]; there {
			found[i] = j
		}
	}
	return found
}

// unmistakable are the elements that have an identity for themselves.
func unmistakable(list []any) map[string]int {
	at, times := map[string]int{}, map[string]int{}
	for i, element := range list {
		id := identity(element)
		at[id] = i
		times[id]++
	}
	maps.DeleteFunc(at, func(id string, _ int) bool { return id == "" || times[id] > 1 })
	return at
}
