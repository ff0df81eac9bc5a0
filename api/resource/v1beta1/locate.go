package v1beta1

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// locate finds the value that does not fit into its field, and says so by the field's path. It is nil if it finds none. The decoder's own errors do not name the
// field where the value is read by a method, and name types of Go where they do.
func locate(raw []byte, into any) error {
	return misfit("", raw, reflect.TypeOf(into))
}

// misfit goes down as far as values and types match.
func misfit(path string, raw []byte, t reflect.Type) error {
	for t.Kind() == reflect.Pointer {
		if string(raw) == "null" {
			return nil
		}
		t = t.Elem()
	}
	into := reflect.New(t).Interface()
	if method, is := into.(json.Unmarshaler); is {
		if err := method.UnmarshalJSON(raw); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return nil
	}
	if t.Kind() != reflect.Struct && t.Kind() != reflect.Map {
		if json.Unmarshal(raw, into) != nil {
			return fmt.Errorf("%s is %s: write %s", path, value(raw), wanted(t))
		}
		return nil
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(raw, &members) != nil {
		return fmt.Errorf("%s is %s: write %s", path, value(raw), wanted(t))
	}
	if t.Kind() == reflect.Map {
		for _, key := range slices.Sorted(maps.Keys(members)) {
			if err := misfit(path+"["+quote(key)+"]", members[key], t.Elem()); err != nil {
				return err
			}
		}
		return nil
	}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		member, said := members[name]
		if !said || name == "" {
			continue // fields of an embedded struct are visible themselves
		}
		if err := misfit(strings.TrimPrefix(path+"."+name, "."), member, f.Type); err != nil {
			return err
		}
	}
	return nil
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a text in quotes"
	case reflect.Bool:
		return "true or false"
	case reflect.Struct, reflect.Map:
		return "an object in braces"
	default:
		return "a whole number"
	}
}

// value is what a user wrote, as JSON.
func value(raw []byte) string { return brief(string(raw)) }
