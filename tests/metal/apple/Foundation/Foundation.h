// Declarations of what mlcpipe/native/metal/gpu.mm uses of Apple's Foundation, to compile it without Apple's SDK.
#pragma once
#include <objc/objc.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long NSUInteger;

__attribute__((objc_root_class))
@interface NSObject
@end

@protocol NSObject
@end

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
@property(readonly) const char* UTF8String;
@end

@interface NSProcessInfo : NSObject
@property(class, readonly, strong) NSProcessInfo* processInfo;
@property(readonly, copy) NSString* operatingSystemVersionString;
@end

@interface NSError : NSObject
@property(readonly, copy) NSString* localizedDescription;
@end
