package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

// spec is the generated part of the policy.
type spec struct {
	Variables   []admissionregistrationv1.Variable
	Validations []admissionregistrationv1.Validation
}

// builder collects the policy while it walks the types.
type builder struct {
	spec
	kind string
	used map[string]bool // the rules that belong to a field
}

func policy() (spec, error) {
	b := &builder{used: map[string]bool{}}
	b.define("parameters", "(request.resource.resource == 'deviceclasses' ? dyn(object).spec.?config : "+
		"request.resource.resource == 'resourceclaims' ? dyn(object).spec.?devices.?config : "+
		"dyn(object).spec.spec.?devices.?config).orValue([])"+
		".filter(c, c.?opaque.?driver.orValue('') == 'gpu.nvidia.com').map(c, c.opaque.parameters)")
	kinds := v1beta1.Kinds()
	b.refuse("parameters", "o.?apiVersion.orValue(null) != '"+v1beta1.APIVersion+"'",
		"The opaque configuration's apiVersion is wrong: set it to "+v1beta1.APIVersion,
		"'The opaque configuration has apiVersion ' + "+text("o.?apiVersion.orValue(null)")+" + ': set it to "+v1beta1.APIVersion+"'")
	b.refuse("parameters", "!(o.?kind.orValue(null) in "+list(kinds...)+")",
		"The opaque configuration's kind is wrong: use one of "+strings.Join(kinds, ", "),
		"'The opaque configuration has kind ' + "+text("o.?kind.orValue(null)")+" + ': use one of "+strings.Join(kinds, ", ")+"'")
	for _, kind := range kinds {
		empty, err := v1beta1.New(kind)
		if err != nil {
			return spec{}, err
		}
		b.kind = kind
		b.define(kind, fmt.Sprintf("variables.parameters.filter(p, p.?kind.orValue(null) == '%s')", kind))
		if err := b.object(kind, "", reflect.TypeOf(empty).Elem()); err != nil {
			return spec{}, fmt.Errorf("%s: %w", kind, err)
		}
	}
	for path := range rules {
		if !b.used[path] {
			return spec{}, fmt.Errorf("rule for %s: no kind has this field", path)
		}
	}
	return b.spec, nil
}

// object adds the checks of a struct. The variable name lists the objects at path.
func (b *builder) object(name, path string, t reflect.Type) error {
	var known []string
	for _, f := range reflect.VisibleFields(t) {
		if key := jsonName(f); key != "" {
			known = append(known, key)
		}
	}
	unknown := "!(k in " + list(known...) + ")"
	b.refuse(name, "o.exists(k, "+unknown+")",
		fmt.Sprintf("%s has an unknown field: remove it, or correct its spelling (upper and lower case matter)", b.in(path)),
		fmt.Sprintf("'%s: unknown field \"%s' + o.filter(k, %s)[0] + '\": remove it, or correct its spelling (upper and lower case matter)'",
			b.kind, prefix(path), unknown))
	for _, f := range reflect.VisibleFields(t) {
		key := jsonName(f)
		if key == "" || path == "" && (key == "apiVersion" || key == "kind") {
			continue
		}
		if err := b.field(name, prefix(path)+key, key, f.Type); err != nil {
			return err
		}
	}
	if slices.Contains(known, "strategy") {
		b.strategies(name, known)
	}
	return nil
}

// strategies adds the check that an object has no settings of another strategy than its own.
func (b *builder) strategies(name string, known []string) {
	for _, strategy := range slices.Sorted(maps.Keys(otherStrategy)) {
		other := otherStrategy[strategy]
		if !slices.Contains(known, other) {
			continue
		}
		message := fmt.Sprintf("%s: sharing.%s does not go with strategy %s: remove it, or set another sharing.strategy", b.kind, other, strategy)
		b.refuse(name, fmt.Sprintf("o.?strategy.orValue(null) == '%s' && o.?%s.orValue(null) != null", strategy, other), message, "")
	}
}

// field adds the checks of one field of the objects in the variable name, and of what it contains.
func (b *builder) field(name, path, key string, t reflect.Type) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	value := "o.?" + key + ".orValue(null)"
	if r, ok := rules[path]; ok {
		b.used[path] = true
		b.refuse(name, "!("+with(value, r.allows)+")",
			fmt.Sprintf("%s: %s is invalid: set it to %s", b.kind, path, r.remedy),
			fmt.Sprintf("'%s: %s is ' + %s + ': set it to %s'", b.kind, path, text(value), r.remedy))
		return nil
	}
	if _, is := reflect.New(t).Interface().(json.Unmarshaler); is {
		return fmt.Errorf("%s is of a type that reads its own JSON: write a rule for it", path)
	}
	var cel, words string
	switch t.Kind() {
	case reflect.Bool:
		cel, words = "bool", "true or false"
	case reflect.Struct, reflect.Map:
		cel, words = "map", "an object in braces"
	default:
		return fmt.Errorf("%s is of type %s: write a rule for it", path, t)
	}
	b.refuse(name, "!("+with(value, "v == null || type(v) == "+cel)+")",
		fmt.Sprintf("%s: %s has a value of the wrong type: set it to %s", b.kind, path, words),
		fmt.Sprintf("'%s: %s is ' + %s + ': set it to %s'", b.kind, path, text(value), words))
	if cel != "map" {
		return nil
	}
	inner := name + "_" + key
	b.define(inner, fmt.Sprintf("variables.%s.map(o, %s).filter(v, type(v) == map)", name, value))
	if t.Kind() == reflect.Map {
		return b.entries(inner, path)
	}
	return b.object(inner, path, t)
}

// entries adds the checks of the keys and values of a map.
func (b *builder) entries(name, path string) error {
	keys, values := rules[path+"[key]"], rules[path+"[]"]
	if keys.allows == "" || values.allows == "" {
		return errors.New(path + " is a map: write rules for its keys and values")
	}
	b.used[path+"[key]"], b.used[path+"[]"] = true, true
	bad := "!(" + with("k", keys.allows) + ")"
	b.refuse(name, "o.exists(k, "+bad+")",
		fmt.Sprintf("%s: %s has a key that names no device: use %s", b.kind, path, keys.remedy),
		fmt.Sprintf("'%s: %s[\"' + o.filter(k, %s)[0] + '\"]: the key names no device: use %s'", b.kind, path, bad, keys.remedy))
	bad = "!(" + with("o[k]", values.allows) + ")"
	b.refuse(name, "o.exists(k, "+bad+")",
		fmt.Sprintf("%s: %s has an invalid value: set it to %s", b.kind, path, values.remedy),
		fmt.Sprintf("o.filter(k, %s).map(k, '%s: %s[\"' + k + '\"] is ' + %s + ': set it to %s')[0]",
			bad, b.kind, path, text("o[k]"), values.remedy))
	return nil
}

// refuse adds a validation that fails if the CEL condition when is true for an object o in the
// variable name. The CEL expression says is the message about the first such object. An empty one
// means the fixed message.
func (b *builder) refuse(name, when, message, says string) {
	refused := fmt.Sprintf("refused%d", len(b.Validations)+1)
	b.define(refused, "variables."+name+".filter(o, "+when+")")
	v := admissionregistrationv1.Validation{
		Expression: "variables." + refused + " == []", Reason: ptr.To(metav1.StatusReasonInvalid), Message: message + ".",
	}
	if says != "" {
		v.MessageExpression = "variables." + refused + ".map(o, " + says + ")[0]"
	}
	b.Validations = append(b.Validations, v)
}

func (b *builder) define(name, expression string) {
	b.Variables = append(b.Variables, admissionregistrationv1.Variable{Name: name, Expression: expression})
}

// in names an object for a fixed message.
func (b *builder) in(path string) string {
	if path == "" {
		return b.kind
	}
	return b.kind + ": " + path
}

// with evaluates a rule's condition for a value.
func with(value, condition string) string { return "[" + value + "].all(v, " + condition + ")" }

// text is a CEL expression that writes a value for a message.
func text(value string) string {
	return "[" + value + "].map(v, type(v) == string ? '\"' + v + '\"' : " +
		"type(v) == int || type(v) == double || type(v) == bool ? string(v) : " +
		"v == null ? 'missing' : type(v) == map ? 'an object' : 'a list')[0]"
}

func prefix(path string) string {
	if path == "" {
		return ""
	}
	return path + "."
}

// jsonName returns the name of a field in JSON, or "" for an embedded struct.
func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}
