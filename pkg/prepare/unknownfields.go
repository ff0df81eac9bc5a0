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

// If this version does not know a field of a recorded step, a later version wrote it and may need
// it again after an upgrade. Such a field is kept as long as the object that contains it exists.

// encodeStepOver encodes s and keeps the fields of old, the step's earlier encoding, that this
// version does not know. If no known field changed, the result is old, byte by byte.
func encodeStepOver(old checkpoint.Step, s Step) (checkpoint.Step, error) {
	stored, err := encodeStep(s)
	if err != nil || old.Kind != stored.Kind {
		return stored, err
	}
	known, err := knownPart(old, s)
	if err != nil {
		return stored, err
	}
	if bytes.Equal(known, stored.Params) {
		return old, nil
	}
	var decoded [3]any
	for i, params := range []json.RawMessage{old.Params, known, stored.Params} {
		// Decode numbers without conversion: no Go number type may fit a number that a later version
		// wrote.
		exact := json.NewDecoder(bytes.NewReader(params))
		exact.UseNumber()
		if err := exact.Decode(&decoded[i]); err != nil {
			return stored, fmt.Errorf("store step %s: %w", s.Kind(), err)
		}
	}
	params, err := json.Marshal(mergeUnknown(decoded[0], decoded[1], decoded[2]))
	if err != nil {
		return stored, fmt.Errorf("store step %s: %w", s.Kind(), err)
	}
	old.Params = params
	return old, nil
}

// knownPart returns the fields of the recorded step old that this version of the driver knows.
func knownPart(old checkpoint.Step, s Step) (json.RawMessage, error) {
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

// mergeUnknown returns the value "now" with the fields of "old" that this version does not know.
// The value "known" is "old" without these fields.
func mergeUnknown(old, known, now any) any {
	switch now := now.(type) {
	case map[string]any:
		was, _ := old.(map[string]any)
		knew, _ := known.(map[string]any)
		for name, value := range was {
			if next, stays := now[name]; stays && hasField(knew, name) {
				now[name] = mergeUnknown(value, knew[name], next)
			} else if !hasField(knew, name) && !hasField(now, name) {
				now[name] = value
			}
		}
	case []any:
		was, _ := old.([]any)
		knew, _ := known.([]any)
		if len(was) != len(knew) {
			return now
		}
		for i, j := range matchElements(knew, now) {
			now[i] = mergeUnknown(was[j], knew[j], now[i])
		}
	}
	return now
}

// hasField reports whether the object has a field called name. It ignores case, as encoding/json
// does.
func hasField(object map[string]any, name string) bool {
	for there := range object {
		if strings.EqualFold(there, name) {
			return true
		}
	}
	return false
}

// identities are names of fields whose value tells the elements of a list apart. If an element has
// several of them, the first in this list counts.
var identities = []string{"id", "daemon", "path", "containerPath", "name"}

// identity returns the value of the first field in identities that the element has. It returns ""
// if the element has none.
func identity(element any) string {
	object, _ := element.(map[string]any)
	for _, name := range identities {
		if value, ok := object[name]; ok {
			return fmt.Sprint(value)
		}
	}
	return ""
}

// matchElements finds the elements of the list "now" in the older list "was", and maps their index
// in now to that in was. Elements match if they are equal, or if no other element has the same
// identity.
func matchElements(was, now []any) map[int]int {
	found, taken := map[int]int{}, map[int]bool{}
	for i, element := range now {
		for j := range was {
			if !taken[j] && reflect.DeepEqual(element, was[j]) {
				found[i], taken[j] = j, true
				break
			}
		}
	}
	before := uniqueElements(was)
	for id, i := range uniqueElements(now) {
		if j, there := before[id]; there {
			found[i] = j
		}
	}
	return found
}

// uniqueElements maps each identity (see identity) that only one element of the list has to that
// element's index.
func uniqueElements(list []any) map[string]int {
	at, times := map[string]int{}, map[string]int{}
	for i, element := range list {
		id := identity(element)
		at[id] = i
		times[id]++
	}
	maps.DeleteFunc(at, func(id string, _ int) bool { return id == "" || times[id] > 1 })
	return at
}
