package v1beta1

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// locate returns an error that names the field in raw whose value has the wrong type for into, or
// nil if there is none. The decoder's own errors name Go types, and name no field if a method of
// the type reads the value.
func locate(raw []byte, into any) error {
	return misfit("", raw, reflect.TypeOf(into))
}

// misfit compares the JSON value raw with the Go type t, from the outer object to the inner fields.
// It returns an error for the first value that does not fit its type, or nil. path is the path of
// raw in the configuration.
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
		member, present := members[name]
		if !present || name == "" {
			continue // An embedded struct has no name. VisibleFields lists its fields too.
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

// value returns the user's JSON, shortened for an error.
func value(raw []byte) string { return brief(string(raw)) }
