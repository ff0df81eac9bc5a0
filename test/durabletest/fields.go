package durabletest

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// CheckFields fails the test unless the JSON fields of the stored types are those of the present
// form of the state files. The file "form".fields in dir lists them, and the directory "form" has
// files of that form. So a field that is added, renamed or removed needs a new form, and the files
// of the form before stay to be read.
//
// stored has a value of each type that is stored, by a name for it. CheckFields never changes an
// existing list. It writes the list of a new form, and then fails.
func CheckFields(t *testing.T, dir, form string, stored map[string]any) {
	t.Helper()
	var lines []string
	for name, v := range stored {
		lines = append(lines, fieldsOf(name, reflect.TypeOf(v), "")...)
	}
	slices.Sort(lines)
	got := strings.Join(lines, "\n") + "\n"
	list := filepath.Join(dir, form+".fields")
	want, err := os.ReadFile(list)
	if errors.Is(err, os.ErrNotExist) {
		if err := os.WriteFile(list, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Fatalf("wrote %s: read it, and run the test again", list)
	}
	if err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(filepath.Join(dir, form)); err != nil || len(files) == 0 {
		t.Errorf("form %s has no files in %s: %v", form, dir, err)
	}
	known := strings.Split(strings.TrimSpace(string(want)), "\n")
	for _, line := range lines {
		if !slices.Contains(known, line) {
			t.Errorf("not in form %s: %s", form, line)
		}
	}
	for _, line := range known {
		if !slices.Contains(lines, line) {
			t.Errorf("only in form %s: %s", form, line)
		}
	}
	if t.Failed() {
		t.Errorf("the stored form changed, and nodes have files of form %s: keep them, and add a form ("+
			"\"field of a state file\" in docs/contributing.md)", form)
	}
}

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

// fieldsOf lists the JSON fields below path, each with its type and options. A type that encodes
// itself is not looked into.
func fieldsOf(path string, of reflect.Type, options string) (lines []string) {
	for _, encodes := range []reflect.Type{jsonMarshaler, textMarshaler} {
		if of.Implements(encodes) || reflect.PointerTo(of).Implements(encodes) {
			return []string{fmt.Sprint(path, " ", of, options)}
		}
	}
	switch of.Kind() {
	case reflect.Pointer:
		return fieldsOf(path, of.Elem(), options)
	case reflect.Slice, reflect.Array:
		return fieldsOf(path+"[]", of.Elem(), options)
	case reflect.Map:
		return fieldsOf(path+"{}", of.Elem(), options)
	case reflect.Struct:
	default:
		return []string{fmt.Sprint(path, " ", of.Kind(), options)}
	}
	if options != "" {
		lines = append(lines, fmt.Sprint(path, " object", options))
	}
	for field := range of.Fields() {
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case name == "-" && options == "" || !field.IsExported() && !field.Anonymous:
		case field.Anonymous && name == "":
			lines = append(lines, fieldsOf(path, field.Type, "")...)
		default:
			if name == "" {
				name = field.Name
			}
			if options != "" {
				options = "," + options
			}
			lines = append(lines, fieldsOf(path+"."+name, field.Type, options)...)
		}
	}
	return lines
}
